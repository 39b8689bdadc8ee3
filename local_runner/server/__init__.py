"""An OpenAI-compatible server for one engine: requests are read, wait in a queue, and become replies and Rounds.

`protocol` reads requests and refuses what cannot be honoured, `jobs` decodes them one after the other, `feed` keeps the
last rounds for whoever watches, `replies` shapes answers, and `app` binds them to routes.
"""
