"""find_unused_parameters=False is as strict as stock, not stricter."""
