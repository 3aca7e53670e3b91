"""The lab: studies of many runs, their verdicts and reports."""
