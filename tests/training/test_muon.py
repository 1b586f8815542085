"""Muon beside AdamW: a step of each, on whose parameters it is."""

import copy

import torch
from torch import nn

from specattn.training.muon import MuonWithAdamW


def test_matrices_step_by_muon_and_all_else_by_adamw():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.RMSNorm(4), nn.Linear(4, 3))
    model[2].weight.requires_grad_(False)
    other, frozen = copy.deepcopy(model), model[2].weight.clone()
    optimizer = MuonWithAdamW(model, matrix_rate=0.03, weight_decay=0.1, lr=2e-3, betas=(0.8, 0.9))
    muon = torch.optim.Muon([other[0].weight], lr=0.03, weight_decay=0.1)
    rest = [p for p in other.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(rest, lr=2e-3, betas=(0.8, 0.9), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        x = torch.randn(5, 6)
        for one in (model, other):
            one.zero_grad()
            one(x).square().sum().backward()
        for part, rate in ((muon, 0.03), (adamw, 2e-3)):
            part.param_groups[0]["lr"] = rate / (1 + step)
            part.step()
        optimizer.step()
        schedule.step()
        for mine, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, expected)
        if step == 1:  # goes on from what was kept
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(model[2].weight, frozen)
