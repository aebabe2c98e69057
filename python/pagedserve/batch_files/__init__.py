"""Batch files: requests in OpenAI's batch format, worked through offline to a file of responses.

``input_file`` reads requests, ``output_file`` holds the responses of this run and earlier ones, and
``run`` sends the requests to the handlers of ``pagedserve.server``, without HTTP.
"""
