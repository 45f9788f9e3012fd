"""What an island's step costs beside the same step written by hand with torch alone."""
