package command

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"strconv"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// LogFlags are the flags of the log of a hub or an agent.
type LogFlags struct {
	verbosity int
	// Format is LogText or OutputJSON.
	Format string
}

// Add adds the flags to flags.
func (l *LogFlags) Add(flags *pflag.FlagSet) {
	flags.IntVarP(&l.verbosity, "v", "v", 0, "verbosity `level` of the log; levels above 5 are for debugging, and level 11 logs each request")
	flags.StringVar(&l.Format, "log-format", LogText, "`format` of the log, text or json")
}

// LogText is the value of --log-format for logs in text.
const LogText = "text"

// infoVerbosity is the highest value of -v without debug logs. The manifest of an agent has --v=5, as in Sveltos, and
// its users expect a short log.
const infoVerbosity = 5

// setKlogVerbosity sets the verbosity of client-go: at 6 it logs each request to an API server with its response code.
func setKlogVerbosity(verbosity int) error {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	if err := flags.Set("v", strconv.Itoa(verbosity)); err != nil {
		return fmt.Errorf("set the verbosity of the log: %w", err)
	}
	return nil
}

// WithLogger returns a context with a logger that writes to out, and makes it the logger of all libraries in this
// process.
func (l *LogFlags) WithLogger(ctx context.Context, out io.Writer) (context.Context, error) {
	debug := max(l.verbosity-infoVerbosity, 0)
	// logr's V(n) is slog's level -n.
	options := &slog.HandlerOptions{Level: slog.Level(-debug)}
	var handler slog.Handler
	switch l.Format {
	case LogText:
		handler = slog.NewTextHandler(out, options)
	case OutputJSON:
		handler = slog.NewJSONHandler(out, options)
	default:
		return nil, fmt.Errorf("--log-format: %q is not supported, must be text or json", l.Format)
	}
	logger := logr.FromSlogHandler(handler)
	log.SetLogger(logger)
	klog.SetLogger(logger)
	if err := setKlogVerbosity(debug); err != nil {
		return nil, err
	}
	return log.IntoContext(ctx, logger), nil
}
