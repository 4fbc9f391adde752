"""The parts of a report: tables, figures, notes, answers."""
