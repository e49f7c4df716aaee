"""Tables, plots and verdicts of result files."""
