package chaos

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// linkState is the state of a link.
type linkState string

const (
	linkOpen linkState = "open"
	// linkCut closes all connections and accepts none.
	linkCut linkState = "cut"
	// linkStalled accepts connections and keeps all of them, but forwards nothing until the link is open again.
	linkStalled linkState = "stalled"
	// linkSlow forwards after a delay.
	linkSlow linkState = "slow"
)

// slowDelay is the delay of a slow link in each direction.
const slowDelay = 400 * time.Millisecond

// link is a TCP proxy in front of an API server.
type link struct {
	name, target string
	listener     net.Listener

	// mu guards the fields below. changed is closed and replaced when they change.
	mu      sync.Mutex
	state   linkState
	changed chan struct{}
	open    map[*connection]bool
	closed  bool
}

// connection is one connection through a link. A lost connection stays open, but the link forwards nothing on it.
type connection struct {
	client, server net.Conn
	isLost         bool // guarded by link.mu
}

func newLink(t *testing.T, name, target string) *link {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &link{name: name, target: target, listener: listener, state: linkOpen, changed: make(chan struct{}), open: map[*connection]bool{}}
	var running sync.WaitGroup
	running.Go(func() { l.accept(&running) })
	t.Cleanup(func() {
		l.close()
		running.Wait()
	})
	return l
}

// url returns the address of the link for clients of the API server.
func (l *link) url() string { return "https://" + l.listener.Addr().String() }

func (l *link) accept(running *sync.WaitGroup) {
	for {
		accepted, err := l.listener.Accept()
		if err != nil {
			return
		}
		running.Go(func() { l.serve(accepted) })
	}
}

func (l *link) serve(accepted net.Conn) {
	defer accepted.Close() //nolint:errcheck // the connection has ended
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if state, _ := l.current(); state == linkCut {
		return
	}
	server, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.target)
	if err != nil {
		return
	}
	defer server.Close() //nolint:errcheck // the connection has ended
	c := &connection{client: accepted, server: server}
	if !l.add(c) {
		return
	}
	defer l.remove(c)
	var both sync.WaitGroup
	both.Go(func() { l.forward(c, server, accepted) })
	both.Go(func() { l.forward(c, accepted, server) })
	both.Wait()
}

func (l *link) add(c *connection) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.state == linkCut {
		return false
	}
	l.open[c] = true
	return true
}

func (l *link) remove(c *connection) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, c)
}

// forward copies from one side to the other until one of them ends. Data of a lost connection is read and not
// forwarded.
func (l *link) forward(c *connection, to, from net.Conn) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 && l.awaitOpen(c) {
			if _, writeErr := to.Write(buffer[:n]); writeErr != nil {
				err = writeErr
			}
		}
		if err != nil {
			l.endBoth(c)
			return
		}
	}
}

// awaitOpen waits until data can be forwarded. It returns false for a lost connection.
func (l *link) awaitOpen(c *connection) bool {
	isDelayed := false
	for {
		state, changed := l.current()
		l.mu.Lock()
		isLost, isClosed := c.isLost, l.closed
		l.mu.Unlock()
		switch {
		case isLost || isClosed:
			return false
		case state == linkStalled:
			<-changed
		case state == linkSlow && !isDelayed:
			isDelayed = true
			select {
			case <-time.After(slowDelay):
			case <-changed:
			}
		default:
			return true
		}
	}
}

// endBoth closes both sides of a connection. A lost connection stays open: each side must detect the loss.
func (l *link) endBoth(c *connection) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.isLost && !l.closed {
		return
	}
	_, _ = c.client.Close(), c.server.Close()
}

func (l *link) current() (linkState, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state, l.changed
}

func (l *link) set(state linkState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = state
	if state == linkCut {
		l.closeAll()
	}
	l.notify()
}

// loseConnections makes all open connections half-open: they stay open on both sides, and no data is forwarded.
func (l *link) loseConnections() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.open {
		c.isLost = true
	}
	l.notify()
}

func (l *link) close() {
	_ = l.listener.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.closeAll()
	l.notify()
}

// closeAll closes all connections. The caller holds mu.
func (l *link) closeAll() {
	for c := range l.open {
		_, _ = c.client.Close(), c.server.Close()
	}
}

// notify wakes the goroutines that wait for a change. The caller holds mu.
func (l *link) notify() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// TestLink checks the states of a link with an echo server, since TestChaos also passes if the links have no faults.
func TestLink(t *testing.T) {
	t.Parallel()
	echo, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = echo.Close() })
	go func() {
		for {
			accepted, err := echo.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(accepted, accepted) }()
		}
	}()
	l := newLink(t, "echo", echo.Addr().String())
	dial := func() net.Conn {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	answers := func(conn net.Conn) bool {
		if _, err := conn.Write([]byte("a")); err != nil {
			return false
		}
		if err := conn.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
			t.Fatal(err)
		}
		_, err := conn.Read(make([]byte, 10))
		return err == nil
	}
	conn := dial()
	if !answers(conn) {
		t.Error("an open link forwards nothing")
	}
	l.set(linkStalled)
	if answers(conn) {
		t.Error("a stalled link forwards")
	}
	l.set(linkSlow)
	if !answers(conn) {
		t.Error("a slow link forwards nothing")
	}
	l.loseConnections()
	if answers(conn) {
		t.Error("a lost connection answers")
	}
	l.set(linkCut)
	if answers(dial()) {
		t.Error("a cut link forwards")
	}
	l.set(linkOpen)
	if !answers(dial()) {
		t.Error("a link that is open again forwards nothing")
	}
}
