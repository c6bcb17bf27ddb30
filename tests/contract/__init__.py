"""What holds for every family and method: tests that name none."""
