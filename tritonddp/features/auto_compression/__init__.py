"""compression="auto": which bucket is compressed, by measured speeds."""
