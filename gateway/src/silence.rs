//! How long an upstream may say nothing in the middle of an answer.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// A bound on silence, waited for beside a body. Bytes that come move no timer: the alarm looks at them when it rings.
#[derive(Debug)]
pub(crate) struct Silence {
    alarm: Pin<Box<Sleep>>,
    limit: Duration,
}

impl Silence {
    /// Rings first after `limit`.
    pub(crate) fn of(limit: Duration) -> Self {
        Self { alarm: Box::pin(tokio::time::sleep(limit)), limit }
    }

    /// Ready once nothing has come for the limit since `last`.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, last: Instant) -> Poll<()> {
        loop {
            ready!(self.alarm.as_mut().poll(cx));
            let due = last + self.limit;
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            self.alarm.as_mut().reset(due);
        }
    }
}
