//! Facts of an overtaken epoch come home, each once, over a real spool and the real embedded log.

use std::fs;
use std::path::{Path, PathBuf};

use waybill_events::log::{Log, Seq};
use waybill_events::shipper::Health;
use waybill_events::spool::{Options, Orphans, Reader, Recovered, Spool};
use waybill_schema::event::{Alive, Epoch, Event, Started};
use waybill_schema::frame::Body;

use super::shipping::{KEEPING, LONG, append, append_and_ship, facts, intrude, log, lose_end, ship, texts};
use super::{MADE, body};

fn open(dir: &Path) -> (Spool, Reader, Recovered) {
    Spool::open(&dir.join("spool"), KEEPING).unwrap()
}

fn started(previous: Option<Epoch>) -> Body {
    Body::of(&Event::Started(Started { version: "1".into(), secret: "s".into(), previous }), MADE)
}

/// A start as a gateway makes it with the log at hand; gives its epoch and how many facts came home.
fn start(dir: &Path) -> (Spool, Reader, u64, u64) {
    let (mut spool, mut reader, recovered) = open(dir);
    let orphans = Orphans::find(&reader, &mut log(dir), &"gw-a".into()).unwrap();
    let previous = orphans.previous(recovered.last);
    let epoch = previous.map_or(1, |previous| previous.epoch + 1);
    spool.begin(epoch).unwrap();
    spool.append(&[started(previous)]).unwrap();
    let adopted = orphans.adopt(&mut spool, &mut reader).unwrap();
    (spool, reader, epoch, adopted)
}

/// A start without the log.
fn start_blind(dir: &Path) -> (Spool, Reader, u64) {
    let (mut spool, reader, recovered) = open(dir);
    let epoch = recovered.last.map_or(1, |last| last.epoch + 1);
    spool.begin(epoch).unwrap();
    spool.append(&[started(recovered.last)]).unwrap();
    (spool, reader, epoch)
}

/// Ships what there is and gives all that the log says but `started`, as epoch and text.
fn shipped(dir: &Path, spool: Spool, reader: Reader) -> Vec<(u64, String)> {
    assert_eq!(ship(reader, log(dir)).stop(LONG).health, Health::Stopped);
    drop(spool);
    let facts = facts(dir);
    assert!(facts.iter().all(|fact| fact.at == MADE), "facts keep the time at which they were made");
    let said = facts.iter().filter(|fact| !matches!(fact.event, Event::Started(_))).cloned().collect::<Vec<_>>();
    texts(&said).into_iter().map(|(epoch, _, text)| (epoch, text)).collect()
}

fn said(facts: &[(u64, &str)]) -> Vec<(u64, String)> {
    facts.iter().map(|(epoch, text)| (*epoch, (*text).to_owned())).collect()
}

/// A life that is fenced: the log has its "one", another process's epoch 2, and not its "two" and "three".
fn fenced_life(dir: &Path) {
    let (mut spool, reader, epoch, _) = start(dir);
    let shipper = ship(reader, log(dir));
    append_and_ship(&mut spool, &shipper, epoch, &["one"]);
    intrude(dir, epoch + 1);
    spool.append(&[body("two"), Body::of(&Event::Alive(Alive { last: 2 }), MADE)]).unwrap();
    let last = append(&mut spool, "three");
    let standing = shipper.progress().wait_for(Epoch { epoch, last }, LONG);
    assert_eq!(standing.health, Health::Fenced { by: Epoch { epoch: 2, last: 1 } });
}

#[test]
fn what_a_fenced_process_recorded_is_recorded_again_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    fenced_life(dir.path());
    let (spool, reader, epoch, adopted) = start(dir.path());
    assert_eq!((epoch, adopted), (3, 2), "what an epoch says of itself is not repeated");
    assert_eq!(spool.last_number(), 3, "directly behind `started`");
    let expected = said(&[(1, "one"), (2, "foreign"), (3, "two"), (3, "three")]);
    assert_eq!(shipped(dir.path(), spool, reader), expected);
    let (spool, reader, epoch, adopted) = start(dir.path());
    assert_eq!((epoch, adopted), (4, 0), "once");
    assert_eq!(shipped(dir.path(), spool, reader), expected);
}

/// Both call their epoch 1, and their numbers say nothing of whose facts they are.
#[test]
fn what_was_recorded_under_an_epoch_that_another_process_took_comes_home() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, reader, epoch) = start_blind(dir.path());
    append(&mut spool, "one");
    append(&mut spool, "two");
    intrude(dir.path(), epoch);
    assert_eq!(ship(reader, log(dir.path())).stop(LONG).health, Health::Fenced { by: Epoch { epoch, last: 1 } });
    drop(spool);
    let (spool, reader, epoch, adopted) = start(dir.path());
    assert_eq!((epoch, adopted), (2, 2));
    let expected = said(&[(1, "foreign"), (2, "one"), (2, "two")]);
    assert_eq!(shipped(dir.path(), spool, reader), expected);
    let Event::Started(started) = &facts(dir.path())[1].event else { panic!("the epoch begins") };
    assert_eq!(started.previous, Some(Epoch { epoch: 1, last: 1 }), "what the log has seen of the epoch before");
}

#[test]
fn a_start_without_the_log_passes_over_no_orphan_and_the_next_one_brings_all_home() {
    let dir = tempfile::tempdir().unwrap();
    fenced_life(dir.path());
    for text in ["four", "five"] {
        let (mut spool, reader, _) = start_blind(dir.path());
        append(&mut spool, text);
        let standing = ship(reader, log(dir.path())).stop(LONG);
        assert_eq!(standing.health, Health::Fenced { by: Epoch { epoch: 2, last: 1 } });
    }
    let (spool, reader, epoch, adopted) = start(dir.path());
    assert_eq!((epoch, adopted), (4, 3), "epoch 3 can be sent as it is");
    let expected = said(&[(1, "one"), (2, "foreign"), (3, "five"), (4, "two"), (4, "three"), (4, "four")]);
    assert_eq!(shipped(dir.path(), spool, reader), expected);
}

#[test]
fn what_the_log_had_taken_before_it_was_overtaken_is_not_doubled_though_the_mark_is_old_or_gone() {
    for mark_stays in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (mut spool, reader, epoch, _) = start(dir.path());
        let shipper = ship(reader, log(dir.path()));
        append_and_ship(&mut spool, &shipper, epoch, &["one"]);
        let mark = dir.path().join("spool/spool.mark");
        let old = fs::read(&mark).unwrap();
        append_and_ship(&mut spool, &shipper, epoch, &["two"]);
        shipper.stop(LONG);
        append(&mut spool, "three");
        drop(spool);
        if mark_stays {
            fs::write(&mark, old).unwrap()
        } else {
            fs::remove_file(&mark).unwrap()
        }
        intrude(dir.path(), epoch + 1);
        let (spool, reader, _, adopted) = start(dir.path());
        assert_eq!(adopted, 1);
        let expected = said(&[(1, "one"), (1, "two"), (2, "foreign"), (3, "three")]);
        assert_eq!(shipped(dir.path(), spool, reader), expected);
    }
}

#[test]
fn what_the_log_lost_before_it_was_overtaken_comes_home_too() {
    let dir = tempfile::tempdir().unwrap();
    let (mut spool, reader, epoch, _) = start(dir.path());
    let shipper = ship(reader, log(dir.path()));
    append_and_ship(&mut spool, &shipper, epoch, &["one", "two", "three"]);
    drop((shipper, spool));
    let n_frames = log(dir.path()).read(Seq::START, 10).unwrap().len() as i64;
    lose_end(dir.path(), n_frames - 2);
    intrude(dir.path(), epoch + 1);
    let (spool, reader, _, adopted) = start(dir.path());
    assert_eq!(adopted, 2);
    let expected = said(&[(1, "one"), (2, "foreign"), (3, "two"), (3, "three")]);
    assert_eq!(shipped(dir.path(), spool, reader), expected);
}

fn segments(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let paths = fs::read_dir(dir.join("spool")).unwrap().map(|entry| entry.unwrap().path());
    let mut segments: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|end| end == "seg"))
        .map(|path| (path.strip_prefix(dir).unwrap().to_owned(), fs::read(&path).unwrap()))
        .collect();
    segments.sort();
    segments
}

/// A kill leaves what was written until then: any beginning of the new segments beside all the old ones, or all the new
/// ones beside any end of the old. Each such folder is started from, with the log and without it.
#[test]
fn an_adoption_that_is_killed_at_any_moment_is_completed_by_a_later_start() {
    let made = tempfile::tempdir().unwrap();
    fenced_life(made.path());
    let old = segments(made.path());
    let mark = fs::read(made.path().join("spool/spool.mark")).unwrap();
    drop(start(made.path()));
    let new = segments(made.path());
    assert!(new.len() == 3 && old.iter().all(|segment| !new.contains(segment)), "the old ones are gone");
    let written = |n_bytes: usize| {
        let mut left = n_bytes;
        let cut = new.iter().map(move |(path, bytes)| {
            let n = left.min(bytes.len());
            left -= n;
            (path.clone(), bytes[..n].to_vec())
        });
        cut.filter(|(_, bytes)| !bytes.is_empty()).collect::<Vec<_>>()
    };
    let n_bytes = new.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
    let writing = (0..=n_bytes).step_by(7).map(|n| [old.clone(), written(n)].concat());
    let removing = (0..=old.len()).map(|n| [old[n..].to_vec(), new.clone()].concat());
    for (folder, blind) in writing.chain(removing).flat_map(|folder| [(folder.clone(), false), (folder, true)]) {
        let dir = tempfile::tempdir().unwrap();
        log(dir.path());
        fs::create_dir(dir.path().join("spool")).unwrap();
        folder.iter().for_each(|(path, bytes)| fs::write(dir.path().join(path), bytes).unwrap());
        fs::write(dir.path().join("spool/spool.mark"), &mark).unwrap();
        copy_log(made.path(), dir.path());
        if blind {
            let (mut spool, reader, _) = start_blind(dir.path());
            append(&mut spool, "new");
            ship(reader, log(dir.path())).stop(LONG);
        }
        let (spool, reader, ..) = start(dir.path());
        let mut all: Vec<String> = shipped(dir.path(), spool, reader).into_iter().map(|(_, text)| text).collect();
        all.retain(|text| text != "new" && !text.starts_with("Alive"));
        all.sort();
        assert_eq!(
            all,
            ["foreign", "one", "three", "two"],
            "{:?}",
            folder.iter().map(|(path, bytes)| (path, bytes.len())).collect::<Vec<_>>()
        );
    }
}

/// Appends all frames of the log in `from` to the empty log in `to`.
fn copy_log(from: &Path, to: &Path) {
    let mut to = log(to);
    let mut last = None;
    for stored in log(from).read(Seq::START, 100).unwrap() {
        let frame = waybill_schema::frame::Frame::parse(stored.bytes).unwrap();
        last = to.append(&[frame], last, stored.sent).unwrap().last().map(|appended| appended.seq);
    }
}

/// A folder that cannot be written stands for any reason for which the disk refuses.
#[test]
fn an_adoption_that_the_disk_refuses_loses_nothing_and_the_next_start_completes_it() {
    let dir = tempfile::tempdir().unwrap();
    fenced_life(dir.path());
    let (folder, elsewhere) = (dir.path().join("spool"), dir.path().join("elsewhere"));
    let (mut spool, mut reader, recovered) = Spool::open(&folder, Options { segment_bytes_max: 1, ..KEEPING }).unwrap();
    let orphans = Orphans::find(&reader, &mut log(dir.path()), &"gw-a".into()).unwrap();
    assert_eq!((orphans.len(), orphans.is_empty()), (2, false));
    spool.begin(3).unwrap();
    spool.append(&[started(orphans.previous(recovered.last))]).unwrap();
    fs::rename(&folder, &elsewhere).unwrap();
    orphans.adopt(&mut spool, &mut reader).unwrap_err();
    fs::rename(&elsewhere, &folder).unwrap();
    drop((spool, reader));
    let (spool, reader, epoch, adopted) = start(dir.path());
    assert_eq!((epoch, adopted), (4, 2));
    let expected = said(&[(1, "one"), (2, "foreign"), (4, "two"), (4, "three")]);
    assert_eq!(shipped(dir.path(), spool, reader), expected);
}
