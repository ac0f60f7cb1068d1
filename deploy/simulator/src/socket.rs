//! A TCP stream that can be made to end in a reset instead of a close.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// What a connection and its calls share.
#[derive(Debug)]
pub(crate) struct Line {
    /// Counted from 1 over the life of the simulator.
    pub(crate) number: u64,
    resets: AtomicBool,
}

impl Line {
    pub(crate) fn new(number: u64) -> Self {
        Self { number, resets: AtomicBool::new(false) }
    }

    /// Makes the end of the connection a reset.
    pub(crate) fn reset(&self) {
        self.resets.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_resetting(&self) -> bool {
        self.resets.load(Ordering::SeqCst)
    }
}

/// The stream of a line.
pub(crate) struct Socket {
    pub(crate) stream: TcpStream,
    pub(crate) line: Arc<Line>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.line.is_resetting() {
            // A lingering time of zero makes the close that follows an RST. A socket that refuses is closed as usual.
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.line.is_resetting() {
            // A FIN before the RST would look like a proper end.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
