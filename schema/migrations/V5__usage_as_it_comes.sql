-- Rows of requests lie in the order in which they were written: a new one costs no search for its place, and what keys
-- spend is summed up from where it ended last. Until here they lay by their key, each beside an index entry for its frame.
CREATE TABLE usage_events_as_they_come (
    request_id     TEXT NOT NULL PRIMARY KEY,
    started        INTEGER NOT NULL,
    ended          INTEGER NOT NULL,
    scope          TEXT NOT NULL,
    key_id         TEXT NOT NULL,
    group_id       TEXT NOT NULL,
    model          TEXT NOT NULL,
    endpoint       TEXT NOT NULL,
    stream         INTEGER NOT NULL,
    session_id     TEXT NOT NULL,
    session_source TEXT NOT NULL,
    signal         TEXT NOT NULL,
    sticky_type    TEXT,
    sticky_hit     INTEGER NOT NULL,
    fallback       INTEGER NOT NULL,
    outcome        TEXT NOT NULL,
    error_class    TEXT,
    code           TEXT,
    status         INTEGER,
    attempts       INTEGER NOT NULL,
    deployment     TEXT,
    latency_ms     INTEGER,
    seq_first      INTEGER NOT NULL,
    seq_last       INTEGER NOT NULL
);
INSERT INTO usage_events_as_they_come SELECT * FROM usage_events ORDER BY seq_last;
DROP TABLE usage_events;
ALTER TABLE usage_events_as_they_come RENAME TO usage_events;

-- A session's rounds, and a scope's sessions by latest activity.
CREATE INDEX usage_events_session ON usage_events (scope, session_id, ended);
