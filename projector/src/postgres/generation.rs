//! Which generation a projector writes to.

use std::cmp::Ordering;

/// The rows were folded by a newer program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("generation {generation} was made by fold version {theirs}, this program has {ours}: upgrade this one")]
pub(super) struct NewerFold {
    generation: u32,
    theirs: u32,
    ours: u32,
}

/// Why there is no generation to go back to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoWayBack {
    #[error("no generation is live, so there is none before it")]
    NoLive,
    #[error("generation {0} is live, and none was before it")]
    First(u32),
    #[error("generation {before}, which was live before {live}, is not there any more")]
    Gone { live: u32, before: u32 },
    #[error("generation {before}, which was live before {live}, was made by another fold than this program's")]
    OtherFold { live: u32, before: u32 },
}

/// A generation as Postgres lists it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) number: u32,
    pub(super) live: bool,
    /// The fold behind its rows; none where nothing was written yet.
    pub(super) fold_version: Option<u32>,
}

/// What a projector is there to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Wanted {
    /// To go on.
    #[default]
    Resume,
    /// To start over beside what is there.
    New,
    /// To go on with the generation that it has begun.
    This(u32),
}

/// Where to write.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// To one that is there.
    Use(u32),
    /// To a new one.
    Make(u32),
}

/// Goes on with the live generation where today's fold made it. Rows of an older fold are not mixed with today's: they
/// stay live while a new generation is filled beside them.
pub(super) fn plan(known: &[Known], wanted: Wanted, ours: u32) -> Result<Plan, NewerFold> {
    if let Wanted::This(number) = wanted {
        return Ok(Plan::Use(number));
    }
    let next = Plan::Make(known.iter().map(|known| known.number).max().unwrap_or(0) + 1);
    let live = known.iter().find(|known| known.live);
    let version = live.map_or(Some(ours), |live| live.fold_version);
    let standing = live.or(known.last());
    match (standing, version.unwrap_or(ours).cmp(&ours)) {
        (Some(standing), Ordering::Greater) => {
            Err(NewerFold { generation: standing.number, theirs: version.unwrap_or(ours), ours })
        }
        _ if wanted == Wanted::New => Ok(next),
        (None, _) => Ok(next),
        (Some(standing), Ordering::Equal) => Ok(Plan::Use(standing.number)),
        (Some(standing), Ordering::Less) => {
            let begun = |known: &&Known| known.number > standing.number && known.fold_version.is_none_or(|n| n == ours);
            Ok(known.iter().rfind(begun).map_or(next, |begun| Plan::Use(begun.number)))
        }
    }
}

/// The generation `before` the live one, if today's fold can go on with it.
pub(super) fn way_back(known: &[Known], before: Option<u32>, ours: u32) -> Result<u32, NoWayBack> {
    let live = known.iter().find(|known| known.live).ok_or(NoWayBack::NoLive)?.number;
    let before = before.ok_or(NoWayBack::First(live))?;
    match known.iter().find(|known| known.number == before) {
        Some(Known { fold_version: Some(version), .. }) if *version == ours => Ok(before),
        Some(Known { fold_version: Some(_), .. }) => Err(NoWayBack::OtherFold { live, before }),
        Some(_) | None => Err(NoWayBack::Gone { live, before }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Generations as `number:version`, with `*` for the live one; today's fold is version 2.
    fn check(known: &str, wanted: Wanted, expected: &str) {
        let known: Vec<Known> = known
            .split_whitespace()
            .map(|text| {
                let (number, version) = text.trim_end_matches('*').split_once(':').expect("a number and a version");
                let number = number.parse().expect("a number");
                Known { number, live: text.ends_with('*'), fold_version: version.parse().ok() }
            })
            .collect();
        let planned = plan(&known, wanted, 2).map_or_else(|error| error.to_string(), |plan| format!("{plan:?}"));
        assert_eq!(planned, expected, "of {known:?}");
    }

    #[test]
    fn the_live_generation_goes_on_under_its_own_fold() {
        check("", Wanted::Resume, "Make(1)");
        check("1:2*", Wanted::Resume, "Use(1)");
        check("1:2 2:2* 3:2", Wanted::Resume, "Use(2)");
        check("1:-", Wanted::Resume, "Use(1)");
        check("1:-*", Wanted::Resume, "Use(1)");
    }

    #[test]
    fn another_fold_begins_a_new_generation_once() {
        check("1:1*", Wanted::Resume, "Make(2)");
        check("1:1* 2:2", Wanted::Resume, "Use(2)");
        check("1:1* 2:-", Wanted::Resume, "Use(2)");
        check("1:1 2:1*", Wanted::Resume, "Make(3)");
    }

    #[test]
    fn an_older_program_touches_nothing() {
        let expected = "generation 1 was made by fold version 3, this program has 2: upgrade this one";
        check("1:3*", Wanted::Resume, expected);
        check("1:3*", Wanted::New, expected);
    }

    #[test]
    fn starting_over_leaves_what_is_there() {
        check("1:2* 2:2", Wanted::New, "Make(3)");
        check("1:1*", Wanted::New, "Make(2)");
        check("1:2* 2:2", Wanted::This(2), "Use(2)");
    }

    #[test]
    fn the_way_back_is_one_that_was_live_under_todays_fold() {
        let known = |number, live, version| Known { number, live, fold_version: Some(version) };
        let back = |known: &[Known], before| way_back(known, before, 2).map_err(|error| error.to_string());
        assert_eq!(back(&[known(1, false, 2), known(3, true, 2)], Some(1)), Ok(1));
        let refused = [
            (back(&[known(1, false, 2)], None), "no generation is live, so there is none before it"),
            (back(&[known(1, true, 2)], None), "generation 1 is live, and none was before it"),
            (back(&[known(3, true, 2)], Some(1)), "generation 1, which was live before 3, is not there any more"),
            (
                back(&[known(1, false, 1), known(3, true, 2)], Some(1)),
                "generation 1, which was live before 3, was made by another fold than this program's",
            ),
        ];
        for (refused, expected) in refused {
            assert_eq!(refused, Err(expected.to_owned()));
        }
    }
}
