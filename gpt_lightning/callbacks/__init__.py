"""What every run measures, shows and keeps."""
