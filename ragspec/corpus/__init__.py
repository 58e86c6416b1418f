"""Documents -> passages -> vectors -> the passages for a question."""
