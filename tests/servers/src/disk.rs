//! A small disk over a folder, to be filled.
//!
//! It is a tmpfs, and mounting one takes CAP_SYS_ADMIN: root has it, and so has anyone in a name space of their own
//! (`unshare --map-root-user --mount`).

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The unit in which a tmpfs gives room.
const PAGE: [u8; 4096] = [0; 4096];

/// A small disk over a folder, until it is dropped.
#[derive(Debug)]
pub struct Disk {
    folder: PathBuf,
}

impl Disk {
    /// Mounts a disk of so many KiB over `folder`, which is made where it is missing.
    ///
    /// # Panics
    /// Where this user may not: the message says how one may.
    pub fn over(folder: &Path, kib: usize) -> Self {
        fs::create_dir_all(folder).expect("a folder can be made");
        let size = format!("size={kib}k");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(folder).output();
        let mount = mount.expect("a disk of its own needs the program `mount`");
        let said = String::from_utf8_lossy(&mount.stderr);
        let how = "run the test as root, or in `unshare --map-root-user --mount`";
        assert!(mount.status.success(), "a disk of its own takes CAP_SYS_ADMIN, which this user lacks: {how}: {said}");
        Self { folder: folder.to_owned() }
    }

    /// Takes all the room that is left, but for the rest of pages in use.
    pub fn fill(&self) {
        let mut filler = File::create(self.filler()).expect("a file can be made");
        let full = loop {
            if let Err(error) = filler.write_all(&PAGE) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::StorageFull);
    }

    /// Gives back what [`fill`](Self::fill) took.
    pub fn make_room(&self) {
        fs::remove_file(self.filler()).expect("the filler can be removed");
    }

    fn filler(&self) -> PathBuf {
        self.folder.join("filler")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily: a process of the test may still use it. A failure would only leave a mount behind.
        let _ = Command::new("umount").arg("--lazy").arg(&self.folder).status();
    }
}
