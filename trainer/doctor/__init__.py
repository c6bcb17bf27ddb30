"""The doctor: other trainers' files and their surroundings, judged by a table of rules. Starts nothing."""
