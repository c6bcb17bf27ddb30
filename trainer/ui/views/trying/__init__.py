"""Views of the page where LoRAs are tried."""
