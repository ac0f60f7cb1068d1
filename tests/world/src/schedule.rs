//! The schedule: what may happen next, drawn from a seed, so that a world can be lived again.
//!
//! Each world has its own weather: every kind of trouble is possible in about half of them, so that a kind is also seen
//! alone. The dice are our own five lines: a seed means the same world whatever becomes of other people's crates.

/// Dice that fall the same way for the same seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// The dice of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.roll() % n as u64) as usize
    }

    /// Whether something of `percent` probability happens.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// One of `things`, `None` where there are none.
    pub fn pick<'a, T>(&mut self, things: &'a [T]) -> Option<&'a T> {
        if things.is_empty() { None } else { things.get(self.below(things.len())) }
    }

    /// How long nothing happens, in milliseconds: mostly little, now and then long enough for deadlines to pass.
    pub fn lull_ms(&mut self) -> i64 {
        let longest = match self.below(100) {
            0..80 => 200,
            80..96 => 4_000,
            _ => 60_000,
        };
        self.below(longest) as i64
    }
}

/// Something that can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A client asks a gateway.
    Ask,
    /// A client that waits for its answer leaves.
    Leave,
    /// An upstream begins to answer a call, and names the response.
    Begin,
    /// An upstream ends a call.
    Answer,
    /// An upstream's mood changes.
    Mood,
    /// A gateway's shipper does its next thing.
    Ship,
    /// A message between a shipper and the log arrives, twice, late or never.
    Deliver,
    /// A gateway says that it is there.
    Alive,
    /// A gateway reads the catalogue on.
    Follow,
    /// A projector does its next thing.
    Project,
    /// An auditor does its next thing.
    Edit,
    /// A gateway is killed.
    Kill,
    /// A killed gateway is started.
    Start,
    /// A gateway is frozen, and started elsewhere under its name on an empty disk.
    Replace,
    /// A frozen gateway goes on.
    Thaw,
    /// The way between a gateway and the log, or Redis, is cut or mended.
    Partition,
    /// Redis loses everything.
    EmptyRedis,
    /// The log loses its last frames.
    LoseTail,
    /// The log's clock moves a little: another leader.
    Leader,
    /// A gateway's disk fills up, or is freed.
    FillDisk,
    /// A damaged disk costs a gateway a fact that the log does not have.
    Damage,
    /// A gateway lets go of acknowledged facts.
    Release,
    /// A projector is killed; it starts again with its next step.
    KillProjector,
}

/// What happens in any weather, and how often.
const DAILY: &[(Action, usize)] = &[
    (Action::Ask, 22),
    (Action::Leave, 2),
    (Action::Begin, 8),
    (Action::Answer, 20),
    (Action::Mood, 3),
    (Action::Ship, 20),
    (Action::Deliver, 26),
    (Action::Alive, 5),
    (Action::Follow, 4),
    (Action::Project, 14),
    (Action::Edit, 6),
];

/// Troubles, and how often they happen in a world that has them.
const TROUBLES: &[(Action, usize)] = &[
    (Action::Kill, 2),
    (Action::Replace, 1),
    (Action::Partition, 3),
    (Action::EmptyRedis, 1),
    (Action::LoseTail, 2),
    (Action::Leader, 1),
    (Action::FillDisk, 2),
    (Action::Damage, 2),
    (Action::Release, 2),
    (Action::KillProjector, 2),
];

/// Which actions a world knows, with their weights.
#[derive(Clone, Debug)]
pub struct Menu {
    actions: Vec<(Action, usize)>,
    total: usize,
}

impl Menu {
    /// Draws the weather of a world.
    pub fn draw(dice: &mut Dice) -> Self {
        let mut actions = DAILY.to_vec();
        actions.extend(TROUBLES.iter().filter(|_| dice.chance(50)));
        actions.extend([(Action::Start, 3), (Action::Thaw, 2)]);
        let total = actions.iter().map(|(_, weight)| weight).sum();
        Self { actions, total }
    }

    /// Draws what happens next.
    pub fn next(&self, dice: &mut Dice) -> Action {
        let mut left = dice.below(self.total);
        for &(action, weight) in &self.actions {
            if left < weight {
                return action;
            }
            left -= weight;
        }
        unreachable!("a number below the sum of the weights falls into one of them")
    }
}
