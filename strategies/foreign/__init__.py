"""Checkpointing by the code of others: functions of the user's, and what libraries switch on."""
