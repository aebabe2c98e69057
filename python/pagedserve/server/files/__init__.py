"""Files of clients, as of OpenAI's ``/v1/files``: the input and the output of batches.

``records`` keeps objects in a directory, ``store`` the contents of files beside theirs, and
``routes`` serve them.
"""
