// Package drift detects changes and deletions of applied objects by others, and triggers their correction.
//
// The engine creates one Corrector per member and calls Run. The Corrector watches the metadata of every kind that a
// record of the member names, and the Secrets of the records. It compares each event with the entry in the inventory,
// and calls the Engine to converge the objects that differ. It reads only the member, so it also works while the hub
// cannot be reached. It also retries runs that failed or were interrupted, and continues withdrawals.
//
// All its state is in memory and can be lost: after a restart the watches list all objects, and drift that occurred
// meanwhile is corrected.
//
// Files, in the order of reading: corrector.go starts everything and queues bundles, watch.go passes the events of the
// API server to it, observation.go decides whether an object has drifted, correct.go processes one bundle from the
// queue, backoff.go delays repeated corrections, withdrawal.go continues withdrawals, and notifier.go calls OnChange
// for bundles with changed objects.
//
// Terms:
//
//   - record: the inventory of one bundle. It has one entry per object.
//   - fingerprint: a hash of Towline's entry in the managedFields of an object. The fingerprint in the record differs
//     from the fingerprint of the object after another client has changed a field that Towline has set.
//   - tracked object: an object with an entry, or the Secret in which Helm stores a deployed release.
//   - owner scope: a hub and a registration of the member with it. owner key: a bundle ID in an owner scope; each
//     applied object has it in annotations.
//   - run: one call of the Engine for a bundle. A retry is a run of all objects of an unfinished bundle, a correction a
//     run of the drifted objects, and a resync a run of all objects, for drift that no watch has reported.
//   - task: the reasons for the next run of a bundle. Each queued bundle has one task, which collects further reasons.
//   - unfinished: the last run of all objects failed, was interrupted, or waits for a Helm release.
//   - lost: the record of a bundle does not exist or is incomplete, because others have deleted a Secret of it. The
//     bundle must be delivered again.
//
// Invariants:
//
//   - Only one worker at a time processes a bundle, and only while the Corrector has acquired it from the Engine. The
//     worker then compares the object with the record again: the event can be the result of an apply of the Engine.
//   - Drift is corrected at once. Events during a run are collected, and corrected by the next run.
//   - An object that others change repeatedly is corrected with growing delays. Other objects of the bundle are not
//     delayed.
//   - Each failed run is retried at the time that the Engine returns, and never if it must fail until the content of
//     the bundle changes. No other part of the process retries it. Drift that was observed before a failed run stays in
//     the next task.
//   - A withdrawal with objects that are still terminating, for example because of finalizers, is checked when a watch
//     reports that one of them no longer exists, and after pauses that grow up to 5 minutes. No other part of the
//     process polls it.
//   - In a failed bundle only the drifted objects are corrected. That neither restarts the failed run nor changes the
//     time of its retry.
//   - Every 10 minutes all objects are compared, independent of the watches. Objects of unfinished bundles wait for the
//     retry.
//   - A hub does not trust its members: the lists of one member together have a maximum number of objects. A list that
//     exceeds it fails, and is read again later. The watched kinds have a maximum number, too: the objects of further
//     kinds are only compared every 10 minutes.
//   - No drift is corrected for bundles without the option CorrectDrift, suspended bundles, and bundles that are being
//     withdrawn.
package drift
