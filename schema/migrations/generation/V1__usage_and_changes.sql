-- One generation: everything that is folded from the log. The names are those of the embedded store.
--
-- Keys are ours, never a provider's or a client's. A text that Postgres cannot hold, or that is too long for an index,
-- ends in `…[changed: N bytes, sum H]`. The projector makes the partitions, one a calendar month in UTC; the default
-- ones hold what no sane clock says.

-- One row a request that got as far as a session. `seq_first` and `seq_last` bound the frames that hold its facts.
-- An abandoned request has no latency, and its `ended` is the last sign of it.
CREATE TABLE usage_events (
    request_id     TEXT COLLATE "C" NOT NULL,
    started        TIMESTAMPTZ NOT NULL,
    ended          TIMESTAMPTZ NOT NULL,
    scope          TEXT COLLATE "C" NOT NULL,
    key_id         TEXT COLLATE "C" NOT NULL,
    group_id       TEXT COLLATE "C" NOT NULL,
    model          TEXT COLLATE "C" NOT NULL,
    endpoint       TEXT NOT NULL,
    stream         BOOLEAN NOT NULL,
    session_id     TEXT COLLATE "C" NOT NULL,
    session_source TEXT NOT NULL,
    signal         TEXT NOT NULL,
    sticky_type    TEXT,
    sticky_hit     BOOLEAN NOT NULL,
    fallback       BOOLEAN NOT NULL,
    outcome        TEXT NOT NULL,
    error_class    TEXT,
    code           TEXT,
    status         INTEGER,
    attempts       INTEGER NOT NULL,
    deployment     TEXT COLLATE "C",
    latency_ms     BIGINT,
    seq_first      BIGINT NOT NULL,
    seq_last       BIGINT NOT NULL,
    PRIMARY KEY (request_id, started)
) PARTITION BY RANGE (started);
CREATE TABLE usage_events_default PARTITION OF usage_events DEFAULT;

-- A session's rounds.
CREATE INDEX usage_events_session ON usage_events (scope, session_id, started);
-- A scope's sessions by latest activity.
CREATE INDEX usage_events_latest ON usage_events (scope, ended DESC, session_id);

-- One row a send: where tokens and money live. A token column is NULL when nobody knows; `estimated` is a bit set
-- (1 input, 2 output, 4 cached, 8 cache_write, 16 reasoning) of the columns that were worked out here. An abandoned send
-- has no end; one whose selection could not be read has neither `upstream_model` nor `reason`.
CREATE TABLE usage_attempts (
    request_id     TEXT COLLATE "C" NOT NULL,
    attempt        INTEGER NOT NULL,
    started        TIMESTAMPTZ NOT NULL,
    ended          TIMESTAMPTZ,
    member         TEXT COLLATE "C" NOT NULL,
    deployment     TEXT COLLATE "C" NOT NULL,
    upstream_model TEXT COLLATE "C",
    reason         TEXT,
    class          TEXT NOT NULL,
    status         INTEGER,
    latency_ms     BIGINT,
    first_token_ms BIGINT,
    input          BIGINT,
    output         BIGINT,
    cached         BIGINT,
    cache_write    BIGINT,
    reasoning      BIGINT,
    estimated      INTEGER NOT NULL,
    cost_nano      BIGINT,
    served_model   TEXT,
    PRIMARY KEY (request_id, attempt, started)
) PARTITION BY RANGE (started);
CREATE TABLE usage_attempts_default PARTITION OF usage_attempts DEFAULT;

-- A deployment's failures.
CREATE INDEX usage_attempts_failures ON usage_attempts (deployment, started DESC) WHERE class <> 'success';

-- Which deployment and session made a response. The first to be seen stands; only its state changes, once, to `final`.
CREATE TABLE response_owners (
    scope          TEXT COLLATE "C" NOT NULL,
    model          TEXT COLLATE "C" NOT NULL,
    endpoint       TEXT NOT NULL,
    response       TEXT COLLATE "C" NOT NULL,
    state          TEXT NOT NULL,
    seen           TIMESTAMPTZ NOT NULL,
    request_id     TEXT COLLATE "C" NOT NULL,
    deployment     TEXT COLLATE "C" NOT NULL,
    channel        TEXT COLLATE "C" NOT NULL,
    incarnation    BIGINT NOT NULL,
    session_id     TEXT COLLATE "C" NOT NULL,
    session_source TEXT NOT NULL,
    PRIMARY KEY (scope, model, endpoint, response)
);

-- What changed for a member: a cooldown or a block began or grew, a success ended one, a hand intervened. The key is
-- that of the fact behind it.
CREATE TABLE health_changes (
    writer      TEXT COLLATE "C" NOT NULL,
    epoch       BIGINT NOT NULL,
    number      BIGINT NOT NULL,
    at          TIMESTAMPTZ NOT NULL,
    target      TEXT COLLATE "C" NOT NULL,
    incarnation BIGINT,
    change      TEXT NOT NULL,
    class       TEXT,
    model       TEXT,
    until       TIMESTAMPTZ,
    failures    BIGINT,
    actor       TEXT,
    reason      TEXT,
    PRIMARY KEY (writer, epoch, number)
);
CREATE INDEX health_changes_target ON health_changes (target, at DESC);

-- One row a changed row of the catalogue, with what stood before and after. `applied` is false for a batch that did not
-- fit the catalogue and was left out whole. `undoes_batch` and `undoes_op` name the change that this one reverses.
CREATE TABLE catalogue_changes (
    writer       TEXT COLLATE "C" NOT NULL,
    epoch        BIGINT NOT NULL,
    number       BIGINT NOT NULL,
    op           INTEGER NOT NULL,
    revision     BIGINT NOT NULL,
    applied      BOOLEAN NOT NULL,
    at           TIMESTAMPTZ NOT NULL,
    actor        TEXT NOT NULL,
    reason       TEXT NOT NULL,
    kind         TEXT NOT NULL,
    row_id       TEXT COLLATE "C" NOT NULL,
    before       JSON,
    after        JSON,
    undoes_batch BIGINT,
    undoes_op    INTEGER,
    PRIMARY KEY (writer, epoch, number, op)
);
CREATE INDEX catalogue_changes_row ON catalogue_changes (kind, row_id, revision);

-- One row a model that came to or left an upstream's list, and what became of it.
CREATE TABLE model_changes (
    writer      TEXT COLLATE "C" NOT NULL,
    epoch       BIGINT NOT NULL,
    number      BIGINT NOT NULL,
    item        INTEGER NOT NULL,
    at          TIMESTAMPTZ NOT NULL,
    channel     TEXT COLLATE "C" NOT NULL,
    incarnation BIGINT NOT NULL,
    model       TEXT COLLATE "C" NOT NULL,
    change      TEXT NOT NULL,
    state       TEXT NOT NULL,
    actor       TEXT,
    PRIMARY KEY (writer, epoch, number, item)
);
CREATE INDEX model_changes_channel ON model_changes (channel, at DESC);

-- What could not be decoded, with its bytes. Line 0 is a frame whose header cannot be read.
CREATE TABLE quarantine (
    seq   BIGINT NOT NULL,
    line  BIGINT NOT NULL,
    why   TEXT NOT NULL,
    bytes BYTEA NOT NULL,
    PRIMARY KEY (seq, line)
);

-- One row a projection: the log position it covers, under which fold, and who may move it. `frame_stored` is when the log
-- stored the frame, in milliseconds since 1970: a log that lost its end may give the same place to the same bytes at
-- another time. `epoch` grows by one with each projector that takes over; one that was overtaken finds another and stops.
CREATE TABLE checkpoints (
    name         TEXT PRIMARY KEY,
    seq          BIGINT NOT NULL,
    frame_sum    TEXT NOT NULL,
    frame_stored BIGINT NOT NULL,
    fold_version BIGINT NOT NULL,
    epoch        BIGINT NOT NULL
);
