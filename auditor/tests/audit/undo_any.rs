//! Any batch of a random history of 200 is taken back exactly, or refused by what a naive model says depends on it.
//!
//! The model gives every change of a row a version of its own. An undo puts versions back: so a batch can be undone
//! exactly where the versions it made stand, and where the rows then still fit together.

use std::collections::{BTreeMap, BTreeSet};

use waybill_auditor::catalogue::undo::Obstacle;
use waybill_auditor::catalogue::{UndoRefused, undo};
use waybill_schema::catalogue::{Member, Row, RowKey, RowKind};
use waybill_schema::event::Stored;

use crate::rows::{Past, channel, group, key, member, organization, route, team, template};

const BATCHES: usize = 200;
const SEEDS: std::ops::Range<u64> = 0..6;
/// So many of the last batches are looked at after each one: undos of undos are soon buried under edits.
const LATE: usize = 5;

/// Draws that a seed repeats (SplitMix64).
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).expect("n fits")
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// One of `all`, or as often none.
    fn maybe<T: Copy>(&mut self, all: &[T]) -> Option<T> {
        (self.below(2) == 0).then(|| self.of(all))
    }

    /// Some row, whose references may be met or not.
    fn row(&mut self) -> Row {
        const MODELS: [&str; 4] = ["m1", "m2", "m*", "n"];
        let (id, text) = (self.of(&["1", "2", "3"]), self.of(&["one", "two", "three"]));
        match self.below(10) {
            0 => channel(self.of(&["a", "b", "c"]), text),
            1 => group(self.of(&["g", "h"]), self.maybe(&MODELS).as_slice()),
            2 => route(self.of(&MODELS), self.maybe(&["m1", "m2", "n", "g", "h"]).as_slice()),
            3..=5 => {
                let place = [self.of(&["g", "h"]), self.of(&MODELS), self.of(&["a", "b", "c"])].join("/");
                member(&place, 1 + self.below(3) as u32)
            }
            6 => {
                let deployment = [self.of(&["a", "b", "c"]), self.of(&["m1", "m2", "n"])].join("/");
                let allocated = self.maybe(&[()]).map(|()| deployment);
                template(id, self.of(&["m1", "m2", "m*", "n", "g"]), allocated.as_deref())
            }
            7 => organization(id, self.maybe(&["1", "2", "3"])),
            8 => team(id, self.maybe(&["1", "2", "3"])),
            _ => key(id, text, self.of(&["g", "h"]), self.maybe(&["1", "2", "3"])),
        }
    }
}

type Images = BTreeMap<RowKey, Row>;

/// The rows that refer to something that is not there, by hand for the names that are drawn.
fn faulty(rows: &Images) -> BTreeSet<RowKey> {
    let has = |kind: RowKind, id: &str| rows.contains_key(&RowKey { kind, id: id.to_owned() });
    let served = |name: &str| {
        has(RowKind::Route, name) || has(RowKind::Group, name) || (name.starts_with('m') && has(RowKind::Route, "m*"))
    };
    let meets = |route: &str, name: &str| route == name || (route == "m*" && name.starts_with('m'));
    let members: Vec<&Member> =
        rows.values().filter_map(|row| if let Row::Member(member) = row { Some(member) } else { None }).collect();
    let fine = |row: &Row| match row {
        Row::Channel(_) => true,
        Row::Group(group) => group.public_models.iter().all(|model| {
            let model = model.as_str();
            let mut here = members.iter().filter(|member| member.group == group.id);
            here.any(|member| meets(member.route.as_str(), model) || meets(model, member.route.as_str()))
        }),
        Row::Route(route) => route.fallbacks.iter().all(|model| served(model.as_str())),
        Row::Member(member) => {
            has(RowKind::Route, member.route.as_str())
                && has(RowKind::Group, member.group.as_str())
                && has(RowKind::Channel, member.channel.as_str())
        }
        Row::Template(template) => template.model_routes.iter().all(|rule| {
            served(rule.model.as_str())
                && rule.allocations.iter().flatten().all(|part| {
                    let (channel, model) = part.deployment.as_str().split_once('/').expect("it has a channel");
                    members.iter().any(|m| m.channel.as_str() == channel && meets(m.route.as_str(), model))
                })
        }),
        Row::Organization(row) => row.template.as_ref().is_none_or(|id| has(RowKind::Template, id.as_str())),
        Row::Team(team) => team.organization.as_ref().is_none_or(|id| has(RowKind::Organization, id.as_str())),
        Row::Key(key) => {
            has(RowKind::Group, key.group.as_str())
                && key.team.as_ref().is_none_or(|id| has(RowKind::Team, id.as_str()))
        }
    };
    rows.iter().filter(|(_, row)| !fine(row)).map(|(key, _)| key.clone()).collect()
}

/// The keys whose secret another key has as well.
fn confused(rows: &Images) -> BTreeSet<RowKey> {
    let secret = |row: &Row| if let Row::Key(key) = row { Some(key.key.clone()) } else { None };
    let shares = |(key, row): &(&RowKey, &Row)| {
        rows.iter().any(|(other, that)| other != *key && secret(row).is_some() && secret(that) == secret(row))
    };
    rows.iter().filter(shares).map(|(key, _)| key.clone()).collect()
}

/// What a batch did: for each row, the version before and the version after.
struct Done {
    touched: BTreeMap<RowKey, (usize, usize)>,
    undoes: Option<usize>,
}

/// A history in the eyes of the code and in those of the naive model.
struct World {
    past: Past,
    done: Vec<Done>,
    /// The version of each row; 0 before its first.
    now: BTreeMap<RowKey, usize>,
    /// What each version holds.
    versions: Vec<Option<Stored>>,
}

/// How often each verdict was met.
type Met = BTreeMap<&'static str, usize>;

impl World {
    fn new() -> Self {
        Self { past: Past::default(), done: Vec::new(), now: BTreeMap::new(), versions: vec![None] }
    }

    /// The rows that stand at these versions.
    fn stored(&self, at: &BTreeMap<RowKey, usize>) -> BTreeMap<RowKey, &Stored> {
        let stored = at.iter().filter_map(|(key, version)| Some((key.clone(), self.versions[*version].as_ref()?)));
        stored.collect()
    }

    fn images(&self, at: &BTreeMap<RowKey, usize>) -> Images {
        self.stored(at).into_iter().map(|(key, stored)| (key, stored.row.clone())).collect()
    }

    /// The rows as bytes, as the model has them.
    fn bytes(&self, at: &BTreeMap<RowKey, usize>) -> String {
        serde_json::to_string(&self.stored(at).into_iter().collect::<Vec<_>>()).expect("rows are JSON")
    }

    /// Makes a batch of some changes that leave the rows fitting together.
    fn edit(&mut self, draws: &mut Draws) {
        let images = self.images(&self.now);
        let target = loop {
            let mut target = images.clone();
            for _ in 0..=draws.below(4) {
                let row = draws.row();
                let gone = draws.below(3) == 0;
                if gone { drop(target.remove(&row.key())) } else { drop(target.insert(row.key(), row)) }
            }
            // Sometimes all that would be left hanging goes too.
            while draws.below(4) > 0 && !faulty(&target).is_empty() {
                faulty(&target).iter().for_each(|key| drop(target.remove(key)));
            }
            if target != images && faulty(&target).is_empty() && confused(&target).is_empty() {
                break target;
            }
        };
        let revision = self.done.len() as u64 + 1;
        let mut touched = BTreeMap::new();
        for key in images.keys().chain(target.keys()) {
            if images.get(key) == target.get(key) || touched.contains_key(key) {
                continue;
            }
            let before = self.now.get(key).copied().unwrap_or_default();
            let incarnation = self.versions[before].as_ref().map_or(revision, |stored| stored.incarnation);
            self.versions.push(target.get(key).map(|row| Stored { incarnation, row: row.clone() }));
            touched.insert(key.clone(), (before, self.versions.len() - 1));
        }
        let batch = self.past.rows.batch_to(target.into_values().collect(), "me", "edit", None);
        self.past.add(batch);
        self.settle(Done { touched, undoes: None });
    }

    /// Undoes batch `index` where that is possible, and says whether it was.
    fn undo(&mut self, index: usize) -> bool {
        if self.past.undo(index as u64 + 1).is_err() {
            return false;
        }
        let touched = self.done[index].touched.iter();
        let touched = touched.map(|(key, (before, after))| (key.clone(), (*after, *before))).collect();
        self.settle(Done { touched, undoes: Some(index) });
        true
    }

    fn settle(&mut self, done: Done) {
        self.now.extend(done.touched.iter().map(|(key, (_, after))| (key.clone(), *after)));
        self.done.push(done);
        assert_eq!(self.past.bytes(), self.bytes(&self.now), "after batch {}", self.done.len());
    }

    fn is_undone(&self, index: usize) -> bool {
        (index + 1..self.done.len()).any(|later| self.done[later].undoes == Some(index) && !self.is_undone(later))
    }

    /// Asks for the undo of batch `index` and compares the answer with the model's.
    fn check(&self, index: usize, met: &mut Met) {
        let batch = index as u64 + 1;
        let answer = undo(&self.past.batches, &self.past.rows, batch, "me", "undo");
        if self.is_undone(index) {
            assert!(matches!(answer, Err(UndoRefused::Undone { .. })), "batch {batch}: {answer:?}");
            *met.entry("undone").or_default() += 1;
            return;
        }
        let touched = &self.done[index].touched;
        let changed: BTreeSet<&RowKey> =
            touched.iter().filter(|(key, (_, after))| self.now[*key] != *after).map(|(key, _)| key).collect();
        let back = touched.iter().map(|(key, (before, _))| (key.clone(), *before));
        let then: BTreeMap<RowKey, usize> = self.now.clone().into_iter().chain(back).collect();
        let images = self.images(&then);
        let (faulty, confused) = (faulty(&images), confused(&images));
        let is_free = changed.is_empty() && faulty.is_empty() && confused.is_empty();
        let obstacles = match answer {
            Ok(undo) => {
                let mut past = Past { rows: self.past.rows.clone(), batches: Vec::new() };
                past.add(undo);
                assert!(is_free, "batch {batch}: {changed:?} {faulty:?} {confused:?}");
                assert_eq!(past.bytes(), self.bytes(&then), "batch {batch}");
                *met.entry("done").or_default() += 1;
                return;
            }
            Err(UndoRefused::Depended { obstacles, .. }) => obstacles,
            Err(other) => panic!("batch {batch}: {other}"),
        };
        let mut named: [BTreeSet<&RowKey>; 3] = Default::default();
        for obstacle in &obstacles {
            let (kind, rows, row, by) = match obstacle {
                Obstacle::Changed { row, batch } => ("changed", 0, row, *batch),
                Obstacle::Needed { by, batch, .. } => ("needed", 1, by, *batch),
                Obstacle::Gone { by, batch, .. } => ("gone", 1, by, *batch),
                Obstacle::Taken { row, batch, .. } => ("taken", 2, row, *batch),
            };
            assert!(by > batch && by <= self.done.len() as u64, "batch {batch}: {obstacle}");
            assert_eq!(touched.contains_key(row), kind != "needed", "batch {batch}: {obstacle}");
            if kind == "changed" {
                assert!(self.done[by as usize - 1].touched.contains_key(row) && !self.is_undone(by as usize - 1));
            }
            named[rows].insert(row);
            *met.entry(kind).or_default() += 1;
        }
        let confused: BTreeSet<&RowKey> = confused.iter().filter(|key| touched.contains_key(key)).collect();
        assert_eq!(named, [changed, faulty.iter().collect(), confused], "batch {batch}: {obstacles:?}");
    }
}

#[test]
fn any_batch_is_taken_back_exactly_or_refused_by_name() {
    let mut met = Met::new();
    for seed in SEEDS {
        println!("seed {seed}");
        let (mut draws, mut world) = (Draws(seed), World::new());
        while world.done.len() < BATCHES {
            let standing = world.past.bytes();
            let undoes = draws.below(3) == 0 && !world.done.is_empty();
            let undone = undoes && {
                // Often a late one, so that undos come to stand on undos.
                let reach = draws.of(&[LATE, BATCHES]).min(world.done.len());
                let index = world.done.len() - 1 - draws.below(reach);
                world.check(index, &mut met);
                world.undo(index)
            };
            if !undone {
                world.edit(&mut draws);
            }
            (world.done.len().saturating_sub(LATE)..world.done.len()).for_each(|index| world.check(index, &mut met));
            // The last batch can always be undone, and nothing is left of it.
            let last = world.past.batches.len() as u64;
            let undo = undo(&world.past.batches, &world.past.rows, last, "me", "undo").expect("nothing is later");
            let mut past = Past { rows: world.past.rows.clone(), batches: Vec::new() };
            past.add(undo);
            assert_eq!(past.bytes(), standing);
        }
        (0..BATCHES).for_each(|index| world.check(index, &mut met));
    }
    println!("{met:?}");
    for verdict in ["done", "undone", "changed", "needed", "gone", "taken"] {
        assert!(met.get(verdict).is_some_and(|n| *n > 5), "{verdict} is hardly met: {met:?}");
    }
}

#[test]
fn edits_undone_from_the_last_to_the_first_pass_through_every_catalogue_there_was() {
    for seed in SEEDS {
        println!("seed {seed}");
        let (mut draws, mut world) = (Draws(seed), World::new());
        let mut before = Vec::new();
        for _ in 0..BATCHES {
            before.push(world.past.bytes());
            world.edit(&mut draws);
        }
        for (index, expected) in before.iter().enumerate().rev() {
            assert!(world.undo(index), "batch {} is the last that stands", index + 1);
            assert_eq!(world.past.bytes(), *expected);
        }
    }
}
