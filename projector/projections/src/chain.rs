//! The chain of frames: every frame names the sum of its writer's frame before, so that none can be changed, left out
//! or put in without notice. That a frame's sum matches its own bytes is what `Frame::parse` checks.

use std::collections::BTreeMap;

use waybill_schema::frame::{Header, Link};
use waybill_schema::id::WriterId;

/// The chains of all writers, as far as they have been followed.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Chains {
    links: BTreeMap<WriterId, Link>,
    n_frames: u64,
}

/// Why a frame does not continue its writer's chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Break {
    /// Another frame number was due.
    Number {
        /// The number that was due.
        due: u64,
        /// The number that came.
        came: u64,
    },
    /// It names another sum than that of the frame before.
    Sum {
        /// The sum of the frame before.
        due: String,
        /// The sum it names.
        came: String,
    },
}

impl Chains {
    /// Follows the next frame of the log; after a break the chain is followed from the frame that broke it.
    pub fn follow(&mut self, header: &Header) -> Result<(), Break> {
        self.n_frames += 1;
        let due = self.links.insert(header.writer.clone(), Link::after(header)).unwrap_or_else(Link::start);
        if header.frame != due.frame {
            return Err(Break::Number { due: due.frame, came: header.frame });
        }
        if header.prev != due.prev {
            return Err(Break::Sum { due: due.prev, came: header.prev.clone() });
        }
        Ok(())
    }

    /// The frames followed.
    pub fn n_frames(&self) -> u64 {
        self.n_frames
    }

    /// What the next frame of `writer` must carry.
    pub fn due(&self, writer: &WriterId) -> Link {
        self.links.get(writer).cloned().unwrap_or_else(Link::start)
    }
}

#[cfg(test)]
mod tests {
    use waybill_schema::frame::Frame;

    use super::*;

    fn sealed(writer: &str, link: Link) -> Header {
        Frame::seal(writer.into(), 1, link, 1, 1, b"{}\n").header
    }

    #[test]
    fn frames_in_order_follow_and_writers_do_not_mix() {
        let mut chains = Chains::default();
        let a1 = sealed("a", Link::start());
        let b1 = sealed("b", Link::start());
        let a2 = sealed("a", Link::after(&a1));
        for header in [&a1, &b1, &a2] {
            assert_eq!(chains.follow(header), Ok(()));
        }
        assert_eq!((chains.n_frames(), chains.due(&"a".into())), (3, Link::after(&a2)));
    }

    #[test]
    fn a_frame_left_out_breaks_the_chain_once() {
        let a1 = sealed("a", Link::start());
        let a2 = sealed("a", Link::after(&a1));
        let a3 = sealed("a", Link::after(&a2));
        let mut chains = Chains::default();
        assert_eq!(chains.follow(&a1), Ok(()));
        assert_eq!(chains.follow(&a3), Err(Break::Number { due: 2, came: 3 }));
        assert_eq!(chains.follow(&sealed("a", Link::after(&a3))), Ok(()));
    }

    #[test]
    fn a_frame_put_in_anothers_place_breaks_the_chain() {
        let a1 = sealed("a", Link::start());
        let forged = sealed("a", Link { frame: 2, prev: "f".repeat(32) });
        let mut chains = Chains::default();
        assert_eq!(chains.follow(&a1), Ok(()));
        assert_eq!(chains.follow(&forged), Err(Break::Sum { due: a1.sum, came: "f".repeat(32) }));
    }
}
