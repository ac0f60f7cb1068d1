//! Free ports of this machine.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// Below what systems give to outgoing connections: a server that is away keeps its port, and a client that tries it
/// meanwhile cannot meet itself there.
const FIRST: u16 = 20_000;
const COUNT: u32 = 10_000;

static TAKEN: AtomicU32 = AtomicU32::new(0);

/// A port that is free now and that this process gives once.
pub(crate) fn free() -> u16 {
    // Processes that run side by side begin at different places.
    let start = std::process::id().wrapping_mul(97);
    let port = |n: u32| FIRST + u16::try_from(start.wrapping_add(n) % COUNT).expect("the count fits a port");
    let mut candidates = std::iter::repeat_with(|| port(TAKEN.fetch_add(1, Ordering::Relaxed))).take(COUNT as usize);
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    candidates.find(is_free).expect("one of ten thousand ports is free")
}
