"""The version, which the build and low layers read without importing the package."""

__version__ = "0.1.0"
