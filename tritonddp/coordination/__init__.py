"""WITH WHAT: what ranks tell each other, and who is named when that fails."""
