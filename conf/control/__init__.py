"""Settings changed while the job runs: files in the folder `control` of its run directory, one for each change."""
