"""The page that shows a comparison: `page.write_report` builds it from the events of a run directory."""
