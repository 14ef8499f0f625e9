// Package drift detects changes and deletions of applied objects by others, and triggers their correction.
//
// A Corrector watches the metadata of every kind that a record of the member names, and the Secrets of the records. It
// compares each event with the entry in the inventory, and asks the Engine to converge again the objects that differ.
// It needs nothing but the records on the member, so it also works while the hub cannot be reached. It also retries
// runs that failed or were interrupted, and withdrawals that have begun.
//
// Everything in it is kept in memory and can be lost: after a restart the watches list all objects, and what has
// changed meanwhile is corrected.
//
// Invariants:
//
//   - One bundle is worked on by one worker at a time, and only while the Corrector has acquired it from the Engine.
//     Whether an object has drifted is decided again then, by the record as it is at that time: the event may be that
//     of an apply.
//   - Events that come together are corrected by one run.
//   - An object that others change again and again is corrected ever more slowly, others of the same bundle are not.
//   - Every run that fails is retried, with a pause that doubles up to 5 minutes. What it had to correct is not lost.
//   - Every 10 minutes all objects are compared, whatever the watches reported.
//   - Bundles without the option CorrectDrift, suspended ones and those that are being withdrawn are not corrected.
//
// A bundle whose record is deleted by others is reported as lost, so that it is delivered again.
package drift
