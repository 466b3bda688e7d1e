"""The executable reference of any recipe, and the high-precision attention it is compared with."""
