"""Recipes that make what the package ships; nothing here is imported by the package."""
