"""What other libraries take from here, a file each; the extra `integrations`."""
