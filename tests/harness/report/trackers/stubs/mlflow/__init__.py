"""A stub of MLflow's client (3.17) as `mlflow_runs` calls it; a store is a JSON file."""
