"""The truth about jobs, in PostgreSQL: what was asked, who works on it, what was answered.

Import the module and call the verb: `claims.claim_shard`, `answers.record_answers`, `status.job_status`. Nothing is
imported here, so that `jobs.answer` and `jobs.options` stay free of SQLAlchemy. No file of this folder imports torch.
"""
