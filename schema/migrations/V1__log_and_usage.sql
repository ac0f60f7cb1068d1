-- The log: one row a frame, byte for byte as it was sealed. Times are milliseconds since 1970, UTC.
CREATE TABLE frames (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    writer  TEXT    NOT NULL,
    epoch   INTEGER NOT NULL,
    frame   INTEGER NOT NULL,
    first   INTEGER NOT NULL,
    last    INTEGER NOT NULL,
    sum     TEXT    NOT NULL,
    sent    INTEGER NOT NULL,
    stored  INTEGER NOT NULL,
    body    BLOB    NOT NULL,
    UNIQUE (writer, frame)
);

-- One row a request that got as far as a session. `seq_first` and `seq_last` bound the frames that hold its facts.
-- An abandoned request has no latency, and its `ended` is the last sign of it.
CREATE TABLE usage_events (
    request_id     TEXT PRIMARY KEY,
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
) WITHOUT ROWID;

-- A session's rounds, and a scope's sessions by latest activity.
CREATE INDEX usage_events_session ON usage_events (scope, session_id, ended);

-- One row a send: where tokens and money live. A token column is NULL when nobody knows; `estimated` is a bit set
-- (1 input, 2 output, 4 cached, 8 cache_write, 16 reasoning) of the columns that were worked out here. An abandoned send
-- has no end; one whose selection could not be read has neither `upstream_model` nor `reason`.
CREATE TABLE usage_attempts (
    request_id     TEXT NOT NULL,
    attempt        INTEGER NOT NULL,
    started        INTEGER NOT NULL,
    ended          INTEGER,
    member         TEXT NOT NULL,
    deployment     TEXT NOT NULL,
    upstream_model TEXT,
    reason         TEXT,
    class          TEXT NOT NULL,
    status         INTEGER,
    latency_ms     INTEGER,
    first_token_ms INTEGER,
    input          INTEGER,
    output         INTEGER,
    cached         INTEGER,
    cache_write    INTEGER,
    reasoning      INTEGER,
    estimated      INTEGER NOT NULL,
    cost_nano      INTEGER,
    served_model   TEXT,
    PRIMARY KEY (request_id, attempt)
) WITHOUT ROWID;

-- What could not be decoded, with its bytes. Line 0 is a frame whose header cannot be read.
CREATE TABLE quarantine (
    seq   INTEGER NOT NULL,
    line  INTEGER NOT NULL,
    why   TEXT    NOT NULL,
    bytes BLOB    NOT NULL,
    PRIMARY KEY (seq, line)
) WITHOUT ROWID;

-- One row a projection: the log position it covers.
CREATE TABLE checkpoints (
    name         TEXT PRIMARY KEY,
    seq          INTEGER NOT NULL,
    frame_sum    TEXT    NOT NULL,
    fold_version INTEGER NOT NULL
) WITHOUT ROWID;
