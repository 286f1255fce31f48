//! The structure of the sources: the rooms of a directory, which are its files and directories,
//! import each other in no circle. They can then be laid on floors, where each room imports only
//! what is below it.

mod imports;
mod source;

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

use imports::Imports;

/// The directories whose rooms are checked: the source of a crate, and the module in it.
const CHECKED: [(&str, &[&str]); 14] = [
    ("cri-shim/cloud-init/src", &[]),
    ("cri-shim/dhcp/src", &[]),
    ("cri-shim/guest-agent/src", &[]),
    ("cri-shim/network/src", &[]),
    ("cri-shim/node-api/src", &[]),
    ("cri-shim/sandbox/src", &[]),
    ("cri-shim/sandbox/src", &["types"]),
    ("cri-shim/sandbox/src", &["wire"]),
    ("cri-shim/src", &[]),
    ("cri-shim/src", &["cli"]),
    ("cri-shim/src", &["cli", "vm"]),
    ("cri-shim/src", &["streaming"]),
    ("vmm/src", &[]),
    ("vmm/src", &["snapshot"]),
];

/// The rooms that each room imports, each with a file that does so and a name that it takes.
type Rooms = BTreeMap<String, BTreeMap<String, String>>;

#[test]
fn rooms_import_each_other_in_no_circle() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut circles = Vec::new();
    for (root, module) in CHECKED {
        let imports = Imports::of(&top.join(root));
        let module: Vec<String> = module.iter().map(ToString::to_string).collect();
        let rooms = rooms(&imports, &module);
        assert!(!rooms.is_empty(), "{root} {module:?}: {rooms:?}");
        if let Some(circle) = circle(&rooms) {
            circles.push(format!("{root}/{}:\n{circle}", module.join("/")));
        }
    }
    assert!(circles.is_empty(), "{}", circles.join("\n"));
}

#[test]
fn a_circle_is_found_and_told_by_its_imports() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; pub use c::Thing;"),
        (
            "a.rs",
            "use crate::b::{self, B as Other}; fn f() -> &'static str { \"crate::c\" }",
        ),
        ("b/mod.rs", "mod deep; // crate::a::A"),
        ("b/deep.rs", "fn f() { let _ = (\'\"\', crate::Thing); }"),
        (
            "c.rs",
            "pub(in crate::a) struct Thing;\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}",
        ),
    ];
    let without = Imports::of_files(files);
    assert_eq!(circle(&rooms(&without, &[])), None);
    let with = files.map(|(path, text)| match path {
        "c.rs" => (path, "use super::a::A;\npub struct Thing;"),
        _ => (path, text),
    });
    let found = circle(&rooms(&Imports::of_files(with), &[])).unwrap();
    for line in [
        "a -> b: a.rs takes ",
        "b -> c: b/deep.rs takes Thing",
        "c -> a: c.rs takes A",
    ] {
        assert!(found.contains(line), "{found}");
    }
}

/// Returns the imports between the rooms of a module. Its own file is the room `mod`.
fn rooms(imports: &Imports, module: &[String]) -> Rooms {
    let room = |path: &[String]| -> Option<String> {
        let rest = path.strip_prefix(module)?;
        Some(rest.first().map_or("mod", String::as_str).to_owned())
    };
    let mut rooms = Rooms::new();
    for import in imports.iter() {
        let (Some(from), Some(to)) = (room(&import.from), room(&import.to)) else {
            continue;
        };
        if from != to {
            let taken = format!("{} takes {}", import.file, import.name);
            rooms.entry(from).or_default().entry(to).or_insert(taken);
        }
    }
    rooms
}

/// Returns the imports of a shortest circle, if there is a circle.
fn circle(rooms: &Rooms) -> Option<String> {
    let circles = rooms.keys().filter_map(|room| path(rooms, room, room));
    let shortest = circles.min_by_key(Vec::len)?;
    let lines = shortest.iter().map(|(from, to)| {
        let taken = &rooms[from][to];
        format!("  {from} -> {to}: {taken}\n")
    });
    Some(lines.collect())
}

/// Returns a shortest path of at least one import.
fn path(rooms: &Rooms, from: &str, to: &str) -> Option<Vec<(String, String)>> {
    let mut before: BTreeMap<&str, &str> = BTreeMap::new();
    let mut next = VecDeque::from([from]);
    while let Some(room) = next.pop_front() {
        for imported in rooms.get(room).into_iter().flat_map(BTreeMap::keys) {
            if before.contains_key(imported.as_str()) {
                continue;
            }
            before.insert(imported, room);
            next.push_back(imported);
        }
    }
    let mut path = Vec::new();
    let mut end = to;
    loop {
        let start = *before.get(end)?;
        path.push((start.to_owned(), end.to_owned()));
        end = start;
        if end == from {
            path.reverse();
            return Some(path);
        }
    }
}
