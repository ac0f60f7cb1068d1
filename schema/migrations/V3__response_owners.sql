-- Which deployment and session made a response. The first to be seen stands; only its state changes, once, to `final`.
CREATE TABLE response_owners (
    scope          TEXT    NOT NULL,
    response       TEXT    NOT NULL,
    model          TEXT    NOT NULL,
    endpoint       TEXT    NOT NULL,
    state          TEXT    NOT NULL,
    seen           INTEGER NOT NULL,
    request_id     TEXT    NOT NULL,
    deployment     TEXT    NOT NULL,
    channel        TEXT    NOT NULL,
    incarnation    INTEGER NOT NULL,
    session_id     TEXT    NOT NULL,
    session_source TEXT    NOT NULL,
    PRIMARY KEY (scope, response)
) WITHOUT ROWID;
