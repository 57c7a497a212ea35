"""What other libraries take from here, a file each; `pip install 'pgra[integrations]'`."""
