"""What `site` and `report` put into their pages."""
