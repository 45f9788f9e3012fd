"""Tools for the development of Atoll; they are not part of the wheel."""
