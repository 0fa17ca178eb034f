"""Batch jobs in OpenAI's file format: a file of requests in, a file of answers out; one that ended early resumes."""
