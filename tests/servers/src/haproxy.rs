//! HAProxy before three gateways, with the configuration that is shipped: gateways come and go on ports of their own.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use tempfile::TempDir;

use crate::port;
use crate::process::{Process, StartError, answers, find_among};

const PACKAGE: &str = "haproxy of the system";
/// Debian keeps it out of the path of most users.
const FOLDER: &str = "/usr/sbin";
const CONFIGURATION: &str = "../../deploy/examples/haproxy.cfg";
/// The gateways in its configuration.
const GATEWAYS: usize = 3;
/// How often other ports are tried where one was taken between its choice and its use.
const STARTS_MAX: usize = 5;

/// One HAProxy.
#[derive(Debug)]
pub struct Haproxy {
    port: u16,
    gateways: [u16; GATEWAYS],
    _folder: TempDir,
    _process: Process,
}

impl Haproxy {
    /// Starts it and waits until it answers.
    ///
    /// # Panics
    /// Where it does not start: the message says why, and what to install.
    pub fn start() -> Self {
        let mut started = Self::try_start();
        for _ in 1..STARTS_MAX {
            let is_taken = matches!(&started, Err(StartError::Ended(said)) if said.contains("cannot bind socket"));
            if !is_taken {
                break;
            }
            started = Self::try_start();
        }
        started.unwrap_or_else(|error| panic!("haproxy: {error}"))
    }

    fn try_start() -> Result<Self, StartError> {
        let (port, gateways) = (port::free(), std::array::from_fn(|_| port::free()));
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let binary = find_among(std::iter::once(FOLDER.into()), "haproxy", PACKAGE)?;
        let configuration = Path::new(env!("CARGO_MANIFEST_DIR")).join(CONFIGURATION);
        let mut env = vec![("WAYBILL_PORT".to_owned(), port.to_string())];
        env.extend(gateways.iter().enumerate().map(|(n, port)| (format!("WAYBILL_GATEWAY_{n}"), port.to_string())));
        let args = ["-db".as_ref(), "-f".as_ref(), configuration.as_os_str()];
        let mut process = Process::start_with(&binary, &args, &env, &folder.path().join("haproxy.log"))?;
        process.wait_until(|| answers(port, b"GET /healthz HTTP/1.0\r\n\r\n", b"HTTP/1."))?;
        Ok(Self { port, gateways, _folder: folder, _process: process })
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        here(self.port)
    }

    /// Where it expects gateway `n`.
    pub fn gateway(&self, n: usize) -> SocketAddr {
        here(self.gateways[n])
    }
}

fn here(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}
