"""What a report consists of: tables, figures, notes, answers."""
