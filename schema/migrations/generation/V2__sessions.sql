-- One row a session: what its rows in usage_events and their sends add up to, so that a list need not add them up
-- (ADR 32). `last_request` ended last, and `session_source` is that one's. `models` and `deployments` hold the first 64
-- names in their order. The key begins with the session so that one can be found by its name alone.
CREATE TABLE sessions (
    session_id      TEXT COLLATE "C" NOT NULL,
    scope           TEXT COLLATE "C" NOT NULL,
    started         TIMESTAMPTZ NOT NULL,
    ended           TIMESTAMPTZ NOT NULL,
    last_request    TEXT COLLATE "C" NOT NULL,
    session_source  TEXT NOT NULL,
    requests        BIGINT NOT NULL,
    failed          BIGINT NOT NULL,
    models          TEXT[] NOT NULL,
    deployments     TEXT[] NOT NULL,
    sends           BIGINT NOT NULL,
    sends_unknown   BIGINT NOT NULL,
    sends_estimated BIGINT NOT NULL,
    input           BIGINT,
    output          BIGINT,
    cached          BIGINT,
    cache_write     BIGINT,
    reasoning       BIGINT,
    cost_nano       BIGINT,
    PRIMARY KEY (session_id, scope)
);

-- All sessions, and those of a scope, by latest activity.
CREATE INDEX sessions_latest ON sessions (ended, scope, session_id);
CREATE INDEX sessions_latest_of_scope ON sessions (scope, ended, session_id);

-- A session's rounds in the order in which they ended; its sessions by latest activity are in their own table now.
CREATE INDEX usage_events_rounds ON usage_events (scope, session_id, ended, request_id);
DROP INDEX usage_events_session;
DROP INDEX usage_events_latest;
