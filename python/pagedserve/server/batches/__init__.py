"""Batches: files of requests in OpenAI's batch format, answered to a file of responses.

``input_file`` reads requests, ``output_file`` holds the responses of this run and earlier ones, and
``run`` sends the requests to the server's handlers, without HTTP: for ``/v1/batches``, which
``service`` keeps in a directory and ``routes`` serve, and for ``pagedserve run-batch``.
"""
