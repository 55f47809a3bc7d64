"""Everything about a table together: as text, JSON, figures and one HTML file."""
