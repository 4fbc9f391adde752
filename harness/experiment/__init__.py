"""The frozen description of one trial: model, mesh, strategies, data, protocol."""
