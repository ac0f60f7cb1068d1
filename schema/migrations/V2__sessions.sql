-- One row a session: what its rows in usage_events and their sends add up to, so that a list need not add them up
-- (ADR 32). `last_request` ended last, and `session_source` is that one's. `models` and `deployments` are JSON lists of
-- the first 64 names in their order. The key begins with the session so that one can be found by its name alone.
CREATE TABLE sessions (
    session_id      TEXT    NOT NULL,
    scope           TEXT    NOT NULL,
    started         INTEGER NOT NULL,
    ended           INTEGER NOT NULL,
    last_request    TEXT    NOT NULL,
    session_source  TEXT    NOT NULL,
    requests        INTEGER NOT NULL,
    failed          INTEGER NOT NULL,
    models          TEXT    NOT NULL,
    deployments     TEXT    NOT NULL,
    sends           INTEGER NOT NULL,
    sends_unknown   INTEGER NOT NULL,
    sends_estimated INTEGER NOT NULL,
    input           INTEGER,
    output          INTEGER,
    cached          INTEGER,
    cache_write     INTEGER,
    reasoning       INTEGER,
    cost_nano       INTEGER,
    PRIMARY KEY (session_id, scope)
) WITHOUT ROWID;

-- All sessions, and those of a scope, by latest activity.
CREATE INDEX sessions_latest ON sessions (ended, scope, session_id);
CREATE INDEX sessions_latest_of_scope ON sessions (scope, ended, session_id);
