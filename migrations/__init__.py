"""Alembic migrations of the job tables, packaged so that an installed wheel can run them."""
