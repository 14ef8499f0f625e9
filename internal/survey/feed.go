package survey

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// lostAfter is how long objects cannot be followed until what is known of them counts as lost. Several attempts are made in that time.
const lostAfter = time.Minute

// feed is how well the objects of one kind can be followed.
type feed struct {
	// known says that all of them were listed once, lost that what is known of them has become old.
	known, lost bool
	// since is when following them began to fail, zero while it does not. why says why it does, in the same words for the same reason.
	since time.Time
	why   string
}

// flows notes that the objects are followed.
func (f *feed) flows() { f.lost, f.since, f.why = false, time.Time{}, "" }

// fails notes that the objects cannot be followed at the moment. A list is asked for where a watch fails: what is said of that is the last word.
func (f *feed) fails(verb string, err error, at time.Time) {
	if f.since.IsZero() {
		f.since = at
	}
	if f.why == "" || verb == verbList {
		f.why = Steadily(err)
	}
}

// look returns what is said of objects that are lost by now, "" of others. pending says that it is not known yet whether they can be followed.
func (f *feed) look(at time.Time) (why string, pending bool) {
	f.lost = f.lost || !f.since.IsZero() && at.Sub(f.since) >= lostAfter
	if f.lost {
		return f.why, false
	}
	return "", !f.known
}

const (
	verbList  = "list"
	verbWatch = "watch"
)

// reported returns source, which tells the tally how well it can follow the objects of a feed.
func (o *Observer) reported(f *feed, source *cache.ListWatch) *cache.ListWatch {
	list, open := source.ListWithContextFunc, source.WatchFuncWithContext
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			all, err := list(ctx, options)
			if err != nil && ctx.Err() == nil {
				o.tally.fails(f, verbList, err, o.opts.Clock.Now())
			}
			return all, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			news, err := open(ctx, options)
			switch {
			case err != nil && ctx.Err() == nil:
				o.tally.fails(f, verbWatch, err, o.opts.Clock.Now())
			case err == nil && options.SendInitialEvents == nil:
				// It goes on where the one before it ended. The others begin anew, and are known when they have told of all objects.
				o.tally.flows(f)
			}
			return news, err
		},
	}
}
