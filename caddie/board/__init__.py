"""A page on this machine alone that shows run folders while runs go on."""
